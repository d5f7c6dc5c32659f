"""Say where runs stand, what became of them and what they learned: read from their directories, on any machine."""
