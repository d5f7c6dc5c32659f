"""What is measured and where it goes: reductions, timing, sinks."""
