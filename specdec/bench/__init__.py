"""Head-to-head: drafters and rivals on the same questions, metrics, an exactness audit, and a report."""
