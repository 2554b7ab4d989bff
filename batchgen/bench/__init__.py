"""`batchgen bench`: what a machine does, measured."""
