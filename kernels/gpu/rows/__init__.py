"""What is computed row by row: norms, gates, rotation of heads. Each reads its rows once."""
