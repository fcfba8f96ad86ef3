"""The benchmark: what is measured, the records kept of it, and their tables and charts."""
