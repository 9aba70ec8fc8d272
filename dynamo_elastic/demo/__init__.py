"""`make demo`: a planner decision grows and shrinks a served model, watched and checked."""
