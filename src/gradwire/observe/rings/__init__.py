"""Reading what flight recorders have written, and putting the records of all ranks on one clock."""
