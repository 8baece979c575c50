"""`/v1/schedules`, and the loop in which a gateway starts what is due."""
