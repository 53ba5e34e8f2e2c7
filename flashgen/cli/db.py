"""flashgen db: rows out of the database, into it, and away."""
