"""What a release needs beside the code: the licences of what it stands on, and the hashes of what was tested."""
