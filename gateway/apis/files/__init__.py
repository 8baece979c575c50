"""OpenAI's Files: uploads that stream to the storage, and their list, content and deletion."""
