#!/usr/bin/env python3
"""Where the headrace command writes: every option that names an output file, on every kind of thing at a path.

usage: files_test.py PATH_OF_HEADRACE
"""
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
from case import Case, main  # noqa: E402
from plain import example, write_file  # noqa: E402

READ = {("run", "--in"), ("check", "--file"), ("bench", "--file")}
NOBODY = 65534


class Files(Case):
    def setUp(self):
        super().setUp()
        self.here = self.folder / "here"  # where nothing but the output may be left behind
        self.here.mkdir()
        write_file(self.x, example("gla"))
        self.writers = {
            ("gen", "--out"): ["gla:fwd", "t5"],
            ("run", "--out"): ["gla", "--in", self.x],
            ("check", "--json"): ["gla:fwd", "t5"],
            ("bench", "--json"): ["gla:fwd", "t5", "--threads", "1", "--min-calls", "1", "--min-seconds", "0.001"],
        }

    def write(self, writer, path, code=0, **options):
        command, option = writer
        return self.headrace(command, *self.writers[writer], option, path, code=code, **options)

    def each(self):
        for number, writer in enumerate(self.writers):
            folder = self.here / f"{number} {writer[0]}"
            folder.mkdir()
            yield writer, folder

    def right(self, writer, content):
        """Whether it is the whole of what the option writes."""
        if writer[1] == "--json":
            return content.startswith(b"{") and content.endswith(b"}\n")
        size = int.from_bytes(content[:8], "little")
        return content[8:9] == b"{" and len(content) > 8 + size

    def assert_written(self, writer, path, folder, names=None):
        self.assertTrue(self.right(writer, path.read_bytes()))
        self.assertEqual(sorted(os.listdir(folder)), sorted(names or [path.name]))

    def test_no_option_is_forgotten(self):
        options = set()
        for command in re.findall(r"^  (\w+) ", self.headrace("--help").split("Subcommands:")[1], re.MULTILINE):
            for option in re.findall(r"(--[\w-]+) FILE", self.headrace(command, "--help")):
                options.add((command, option))
        self.assertEqual(options, READ | set(self.writers))

    def test_regular_files(self):
        for writer, folder in self.each():
            path = folder / "file"
            self.write(writer, path)
            self.assert_written(writer, path, folder)
            mask = os.umask(0)
            os.umask(mask)
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o666 & ~mask)
            path.write_text("old")
            path.chmod(0o640)
            inode = path.stat().st_ino
            self.write(writer, path)
            self.assert_written(writer, path, folder)
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o640)
            self.assertNotEqual(path.stat().st_ino, inode, "the old file was written into")

    def test_links(self):
        for writer, folder in self.each():
            inner = folder / "inner"
            inner.mkdir()
            (inner / "target").write_text("old")
            (folder / "direct").symlink_to(inner / "target")
            (inner / "relative").symlink_to("../direct")
            (folder / "chain").symlink_to("inner/relative")
            (folder / "dangling").symlink_to("inner/new")
            (folder / "over").symlink_to("inner")
            for name, target in (("direct", "target"), ("chain", "target"), ("dangling", "new"),
                                 ("over/target", "target")):
                (inner / "target").write_text("old")
                self.write(writer, folder / name)
                self.assertTrue(self.right(writer, (inner / target).read_bytes()), name)
            self.assertEqual({path.name for path in folder.rglob("*") if path.is_symlink()},
                             {"direct", "relative", "chain", "dangling", "over"})
            self.assertEqual(sorted(os.listdir(inner)), ["new", "relative", "target"])
            (folder / "a").symlink_to("b")
            (folder / "b").symlink_to("a")
            self.write(writer, folder / "a", code=2)
            self.one_line("symbolic links")

    def test_fifo(self):
        for writer, folder in self.each():
            path = folder / "fifo"
            os.mkfifo(path)
            (folder / "link").symlink_to("fifo")
            for name in ("fifo", "link"):
                read = []
                reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
                reader.start()
                try:
                    self.write(writer, folder / name)
                finally:  # what did not write into it leaves the reader waiting
                    if stat.S_ISFIFO(path.stat().st_mode):
                        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                reader.join(5)
                self.assertTrue(read and self.right(writer, read[0]))
                self.assertTrue(stat.S_ISFIFO(path.stat().st_mode))

    def test_devices(self):
        """Copies of /dev/null and /dev/full, where they can be made; never the real ones."""
        if os.geteuid() != 0:
            self.skipTest("only root makes devices")
        for writer, folder in self.each():
            null, full = folder / "null", folder / "full"
            for path, minor in ((null, 3), (full, 7)):
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
                try:
                    path.write_bytes(b"")
                except PermissionError:
                    self.skipTest("devices do not work in the folder of temporary files")
            self.write(writer, null)
            self.write(writer, full, code=2)
            self.one_line("full: could not be written: No space left on device")
            for path in (null, full):
                self.assertTrue(stat.S_ISCHR(path.stat().st_mode))
            self.assertEqual(sorted(os.listdir(folder)), ["full", "null"])

    def test_open_files(self):
        """What leads to /proc/self/fd, as /dev/stdout and /dev/fd do, is written at its position, whatever it is."""
        for writer, folder in self.each():
            out = self.folder / f"stdout of {writer[0]}"  # a link that a mistake may destroy
            out.symlink_to("/proc/self/fd/1")
            command = [self.program, writer[0], *map(str, self.writers[writer]), writer[1]]
            piped = subprocess.run([*command, out], stdout=subprocess.PIPE, check=True).stdout
            self.assertRegex(piped, rb'"results"|"cases"|"q"|"o"')
            path = folder / "log"
            with path.open("wb", buffering=0) as log:
                log.write(b"before\n")
                number = log.fileno()
                subprocess.run([*command, out], stdout=log, check=True)
                subprocess.run([*command, f"/dev/fd/{number}"], stdout=subprocess.DEVNULL, pass_fds=[number],
                               check=True)
                log.write(b"after\n")
            content = path.read_bytes()
            self.assertTrue(content.startswith(b"before\n") and content.endswith(b"after\n"))
            self.assertEqual(len(re.findall(rb'"results"|"cases"|"q":|"o":', content)), 2)
            self.assertEqual(os.listdir(folder), ["log"])
            self.assertTrue(out.is_symlink())
            with path.open("rb") as log:
                self.write(writer, f"/dev/fd/{log.fileno()}", code=2, pass_fds=[log.fileno()])
                self.one_line("open for reading only")
            self.write(writer, "/dev/fd/987", code=2)
            self.one_line("Bad file descriptor")

    def test_what_is_refused(self):
        for writer, folder in self.each():
            (folder / "directory").mkdir()
            (folder / "link").symlink_to("directory")
            server = socket.socket(socket.AF_UNIX)
            self.addCleanup(server.close)
            server.bind(str(folder / "socket"))
            (folder / "file").write_text("old")
            before = sorted(os.listdir(folder))
            for path, expected in ((folder, "it is a folder"), (folder / "link", "it is a folder"),
                                   (folder / "socket", "it is a socket"), ("", "expected the name of a file"),
                                   (folder / "none" / "y", "No such file or directory"),
                                   (folder / "file" / "y", "Not a directory"),
                                   (f"{folder}/new/", "expected the name of a file"),
                                   (folder / ("n" * 300), "File name too long")):
                self.assertEqual(self.write(writer, path, code=2), "")
                self.one_line(expected)
            self.assertEqual(sorted(os.listdir(folder)), before)
            self.assertEqual((folder / "file").read_text(), "old")

    def test_permissions(self):
        program = self.folder / "headrace"  # where nobody may run it
        shutil.copy(self.program, program)
        user = {"user": NOBODY} if os.geteuid() == 0 else {}
        self.program = str(program)
        self.folder.chmod(0o755)
        for writer, folder in self.each():
            kept, closed = folder / "kept", folder / "closed"
            kept.write_text("old")
            kept.chmod(0o444)
            closed.mkdir()
            (closed / "file").write_text("old")
            (closed / "file").chmod(0o666)
            folder.chmod(0o777)
            closed.chmod(0o555)
            for path, expected in ((kept, "could not be written: Permission denied"),
                                   (closed / "new", f"could not be created: Permission denied: folder {closed}"),
                                   (closed / "file", f"could not be created: Permission denied: folder {closed}")):
                self.assertEqual(self.write(writer, path, code=2, **user), "")
                self.one_line(expected)
            self.assertEqual((kept.read_text(), (closed / "file").read_text()), ("old", "old"))
            closed.chmod(0o755)

    def test_a_failed_write_leaves_the_old_file(self):
        small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))}
        for writer, folder in self.each():
            path = folder / "file"
            path.write_text("old")
            self.write(writer, path, code=2, **small)
            self.one_line("file: could not be written: File too large")
            self.write(writer, folder / "new", code=2, **small)
            self.assertEqual(os.listdir(folder), ["file"])
            self.assertEqual(path.read_text(), "old")

    def test_a_signal_leaves_the_old_file(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            path = self.here / "file"
            path.write_text("old")
            process = subprocess.Popen([self.program, "gen", "gla:fwd", "t100000", "h4", "--out", path],
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
            while len(os.listdir(self.here)) == 1 and process.poll() is None:
                time.sleep(0.001)
            process.send_signal(number)
            self.assertEqual(process.wait(60), -number, "it ended before the signal")
            self.assertEqual(os.listdir(self.here), ["file"])
            self.assertEqual(path.read_text(), "old")


if __name__ == "__main__":
    main()
