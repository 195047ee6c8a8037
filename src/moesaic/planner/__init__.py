"""What to deploy, and studies of what happens then. No torch."""
