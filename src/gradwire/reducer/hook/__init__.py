"""Running a communication hook on the buckets of a model: its states, its driver, agreement between ranks."""
