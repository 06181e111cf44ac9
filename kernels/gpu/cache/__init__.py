"""What writes the paged cache and moves its blocks. What reads it is attention's."""
