"""Services that every process uses: settings, logging, the embedded Redis, and monitoring of event loops."""
