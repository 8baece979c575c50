"""The Responses API: its bodies, its stored records, and answers as JSON or as streams of typed events."""
