"""The worker shell: one Dynamo instance and one participant of scale operations a rank."""
