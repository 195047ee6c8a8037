"""Every value that crosses a file or a process. No torch."""
