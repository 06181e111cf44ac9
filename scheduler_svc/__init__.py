"""The scheduler service: requests, queues, block tables and text. Runs without a GPU and never imports torch."""
