"""What a request needs of a GPU: rows, memory and time, estimated from measurements before anything is downloaded."""
