"""What every process runs on: settings, logs, the embedded Redis, and watches over event loops."""
