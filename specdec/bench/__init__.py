"""The bench: drafters and rivals on the same questions, with metrics, an exactness audit and a report."""
