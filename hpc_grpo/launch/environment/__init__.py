"""Which environment variables reach Ray and its actors, and why."""
