"""The environments that come with the package."""
