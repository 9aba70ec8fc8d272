"""Where weights live: one arena a rank, at addresses that survive a snapshot."""
