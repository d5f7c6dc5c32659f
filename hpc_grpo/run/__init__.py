"""The run directory, the contract between processes: where each file is, who writes it, and how it is read."""
