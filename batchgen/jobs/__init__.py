"""Job files for people: example files, from which new ones are made, and how a job came about."""
