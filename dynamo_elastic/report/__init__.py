"""What happened in an operation, for people: the story, its files, the terminal and the page."""
