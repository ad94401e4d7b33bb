"""What is made with the library, and what it never imports: command line, benchmarks, papers."""
