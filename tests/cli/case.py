"""Case: a test that runs the headrace command in a folder of its own."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest


class Case(unittest.TestCase):
    program = ""  # the path of headrace

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.x, self.y = self.folder / "x.safetensors", self.folder / "y.safetensors"

    def headrace(self, *arguments, code=0, **options):
        """What the command prints; its exit code must be `code`."""
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True, timeout=600,
                              check=False, **options)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        self.stderr = done.stderr
        return done.stdout

    def json(self, *arguments):
        return json.loads(self.headrace(*arguments))

    def one_line(self, expected):
        """The command failed with one line on stderr that holds `expected`."""
        self.assertIn(expected, self.stderr)
        self.assertTrue(self.stderr.startswith("headrace: "), self.stderr)
        self.assertEqual(self.stderr.count("\n"), 1, self.stderr)

    def refused(self, expected, *arguments, **options):
        """The command fails with one line that holds `expected` and writes no output."""
        self.assertEqual(self.headrace(*arguments, code=2, **options), "")
        self.one_line(expected)
        self.assertFalse(self.y.exists())


def main():
    Case.program = sys.argv.pop(1)
    unittest.main()
