"""`penstock flows`: batches of a server whose rows wait for rows."""
