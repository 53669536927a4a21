"""What all REST responses share: headers, errors, and how times are written."""
