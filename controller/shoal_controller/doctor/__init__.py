"""What `shoal doctor` looks at on the controller's side. What an extra brings is imported where it is needed only."""
