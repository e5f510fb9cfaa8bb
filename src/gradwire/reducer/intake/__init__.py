"""Which gradients have arrived, and which buckets they fill."""
