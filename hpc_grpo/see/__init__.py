"""Where runs stand, from their directories alone: no scheduler is asked, and nothing heavy is imported."""
