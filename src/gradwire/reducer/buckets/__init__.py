"""Which parameter lies in which bucket, and the memory of the buckets."""
