"""What a run would find on this machine, told before it."""
