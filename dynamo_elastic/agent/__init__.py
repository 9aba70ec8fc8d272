"""One per host: GPU slots, engines and their pid namespace, snapshots, the ladder of tiers."""
