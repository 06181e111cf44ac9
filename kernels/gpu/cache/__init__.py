"""What writes the paged cache and moves its blocks."""
