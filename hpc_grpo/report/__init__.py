"""Where runs stand and what became of them, read from their directories alone."""
