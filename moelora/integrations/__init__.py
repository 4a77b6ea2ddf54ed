"""Drop-ins for other people's model code; each module is imported on demand."""
