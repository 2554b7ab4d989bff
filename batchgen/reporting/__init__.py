"""`batchgen report`: one HTML page that says how a run went and shows pictures of it."""
