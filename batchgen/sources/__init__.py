"""What `batchgen import` reads, one module per kind: text tables, JSON lines, Hugging Face datasets."""
