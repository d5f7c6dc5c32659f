"""The environment variables that reach Ray and its actors, and why."""
