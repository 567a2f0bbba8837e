#!/usr/bin/env python3
"""The headrace command under faults: a full or closed stdout, wrong numbers and names, little memory, signals.

usage: faults_test.py PATH_OF_HEADRACE
"""
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from case import Case, main  # noqa: E402
from plain import example, write_file  # noqa: E402

HUGE = "t16777216 h128 k128"  # tensors of 1 TiB each in f32


def limited(bytes_of_address_space):
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (bytes_of_address_space,) * 2)}


class Stdout(Case):
    def setUp(self):
        super().setUp()
        write_file(self.x, example("gla"))
        bench = ["bench", "gla:fwd", "t5", "--min-calls", "1", "--min-seconds", "0.001"]
        self.commands = {
            "list": [["list"], ["list", "--json"]],
            "explain": [["explain", "gla:fwd"], ["explain", "gla:fwd", "--json"]],
            "plan": [["plan", "gla:fwd"], ["plan", "gla:fwd", "--json"]],
            "gen": [["gen", "gla:fwd", "t5", "--out", self.y]],
            "run": [["run", "gla", "--in", self.x, "--out", self.y, *flags] for flags in ([], ["--json"])],
            "check": [["check", "gla:fwd", "t5", *flags] for flags in ([], ["-v"], ["--json", "-"])],
            "bench": [bench, [*bench, "--json", "-"]],
        }

    def every_call(self):
        """Every command in every form, and every help page, as listed by the general one."""
        listed = re.findall(r"^  (\w+) ", self.headrace("--help").split("Subcommands:")[1], re.MULTILINE)
        self.assertEqual(listed, list(self.commands))
        yield from (["--help"], ["--version"])
        for name, calls in self.commands.items():
            yield [name, "--help"]
            yield from calls

    def run_into(self, call, **options):
        return subprocess.run([self.program, *map(str, call)], stderr=subprocess.PIPE, text=True, timeout=120,
                              check=False, **options)

    def assert_failed(self, done, call):
        self.assertEqual(done.returncode, 2, call)
        self.assertIn("headrace: stdout: could not be written", done.stderr, call)

    def test_full(self):
        for call in self.every_call():
            with open("/dev/full", "wb") as full:
                self.assert_failed(self.run_into(call, stdout=full), call)

    def test_closed(self):
        for call in self.every_call():
            done = self.run_into(call, preexec_fn=lambda: os.close(1))
            self.assert_failed(done, call)
        # what is printed does not end in the file, which would be the first to get the free descriptor
        self.assertEqual(self.y.read_bytes().count(b"gla"), self.y.read_bytes().count(b'"gla"'))

    def test_closed_pipe(self):
        """As of `| head -1`: ended quietly by SIGPIPE; where that is ignored, a failed write."""
        for call in self.every_call():
            for ignored in (False, True):
                read, write = os.pipe()
                os.close(read)
                handler = signal.SIG_IGN if ignored else signal.SIG_DFL
                done = self.run_into(call, stdout=write, restore_signals=False,
                                     preexec_fn=lambda: signal.signal(signal.SIGPIPE, handler))  # noqa: B023
                os.close(write)
                if ignored:
                    self.assert_failed(done, call)
                else:
                    self.assertEqual((done.returncode, done.stderr), (-signal.SIGPIPE, ""), call)

    def test_a_missed_check_too(self):
        with open("/dev/full", "wb") as full:
            self.assert_failed(self.run_into(["check", "gla:fwd", "t5", "scale=1e300"], stdout=full), "check")

    def test_long_commands_stop_early(self):
        for call in (["check", "--random", "1000000", "-v"],
                     ["bench", "gla:fwd", "t5", "gla:fwd", "t6", "--min-seconds", "1000"]):
            with open("/dev/full", "wb") as full:
                self.assert_failed(self.run_into(call, stdout=full), call)


class Usage(Case):
    """Every mistake of the caller exits with 2; 1 is left to problems that were computed and missed."""

    def test_numbers(self):
        wrong = ["99999999999999999999", "-99999999999999999999", "-1", "1.5"]
        no_numbers = ["nan", "inf", "-inf", "1e999", "1x", "0x10", "1_0", "1,5", " 1", "1 ", "", "x"]
        real = {("run", "--scale"), ("run", "--lower-bound"), ("bench", "--min-seconds"), ("plan", "--gflops")}
        write_file(self.x, example("gla"))
        required = {"gen": ["gla:fwd", "--out", self.y], "run": ["gla", "--in", self.x, "--out", self.y],
                    "check": ["gla:fwd", "t5"], "bench": ["gla:fwd", "t5"], "plan": ["gla:fwd", "t5"]}
        found = set()
        for command in re.findall(r"^  (\w+) ", self.headrace("--help").split("Subcommands:")[1], re.MULTILINE):
            page = self.headrace(command, "--help")
            self.assertNotRegex(page, r"--[\w-]+ (INT|UINT|FLOAT)")  # numbers that another reader would take
            for option in re.findall(r"(--[\w-]+) NUMBER", page):
                found.add((command, option))
                for value in no_numbers + (wrong if (command, option) not in real else []):
                    self.refused(f"{option}: expected a ", command, *required[command], option, value)
        self.assertTrue(real <= found and len(found) == 12, found)
        self.refused("--min-seconds", "bench", "gla:fwd", "--min-seconds", "-1")

    def test_words_of_problems(self):
        self.headrace("plan", "gla:fwd", "x", code=2)
        words = re.search(r"expected one of (.*)", self.stderr)[1].split(", ")
        keys = [word for word in words if word.endswith("=")] + ["b", "t", "h", "hv", "k", "v"]
        self.assertGreater(len(keys), 20)
        for key in keys:
            for value in ("99999999999999999999999", "-99999999999999999999999", "nan", "inf", "1e999", "1x", "0x10",
                          ""):
                number = value.lstrip("-").isdigit()
                if number and (key == "scale=" or (key == "gamma=" and value.startswith("-"))):
                    continue  # which is one that may stand there
                self.refused("expected ", "plan", "kda:fwd", key + value)
        for sizes in ("b16777216 t16777216", "h16777216 hv16777216 k16777216 v16777216", "t1 k16777216 v16777216",
                      "varlen=0,16777216 h65536 k65536", "b4194304 t1 k65536 v65536 state=inout"):
            for direction in ("fwd", "bwd"):
                for command in ("plan", "check", "bench"):
                    self.refused("headrace: ", command, f"gla:{direction} {sizes}")

    def test_names(self):
        write_file(self.x, example("gla"))
        listing = self.folder / "problems"
        listing.write_text("gla:fwd t5\ngla:fwd t6 force=nobody\n")
        name = ["gla:fwd", "t5", "force=nobody"]
        calls = [["explain", *name], ["plan", *name], ["gen", *name, "--out", self.y], ["check", *name],
                 ["bench", *name], ["run", "gla", "--in", self.x, "--out", self.y, "--force", "nobody"],
                 ["check", "--file", listing], ["bench", "--file", listing]]
        for call in calls:
            self.refused("force: expected one of ", *call)
            self.assertIn("generic.recurrent, got nobody", self.stderr)
        environment = {"env": {**os.environ, "HEADRACE_FORCE": "nobody"}}
        for call in (["check", "gla:fwd"], ["check", "--random", "3"], ["bench", "gla:fwd"], ["explain", "gla:fwd"]):
            self.refused("HEADRACE_FORCE: expected one of ", *call, **environment)

    def test_what_the_library_refuses_is_no_miss(self):
        candidates = self.json("explain", "gla:fwd", "gv", "--json")["candidates"]
        refusing = next(row["name"] for row in candidates if not row["accepts"])
        for command in ("check", "bench"):
            self.refused("the forced implementation refuses", command, "gla:fwd", "t5", "gla:fwd", "gv",
                         f"force={refusing}")


class Memory(Case):
    problem = re.compile(r"not enough memory: needs ([\d.e+]+) GiB, available are ([\d.e+]+) GiB \(.+\)\n$")

    def needs(self, *arguments, **options):
        """What the refusal says, in bytes."""
        begin = time.monotonic()
        self.refused("not enough memory: needs ", *arguments, **options)
        self.assertLess(time.monotonic() - begin, 20)
        need, available = (float(number) for number in self.problem.search(self.stderr).groups())
        self.assertLess(available, need)
        return need * 2 ** 30

    def test_huge_problems(self):
        for words in (HUGE, "varlen=0,16777216 h128 k128"):
            for call in (["check"], ["bench"], ["gen", "--out", self.y]):
                for direction in ("fwd", "bwd"):
                    self.assertGreater(self.needs(*call, f"gla:{direction} {words}"), 2 ** 42)
        self.assertGreater(self.needs("check", "gla:fwd t5", f"kda:fwd {HUGE}", "--all"), 2 ** 42)

    def test_little_memory(self):
        for words in ("t10000000 h4 k128", "varlen=0,2000000", "b4000000 t1 h1 state=inout",
                      "t1 h1 k32768 v32768 state=out"):
            for call in (["check"], ["bench"], ["gen", "--out", self.y]):
                if call[0] == "gen" and "state=out" in words:
                    continue  # its inputs are small
                self.needs(*call, f"gla:fwd {words}", **limited(2 << 30))
        self.needs("check", "gla:step b2000 t1 h4 k128", **limited(1 << 30))

    def test_run(self):
        tensors = {name: ("F32", [1, 1, heads, 2048], [0.0] * heads * 2048)
                   for name, heads in (("q", 1), ("k", 1), ("v", 128))}
        write_file(self.x, tensors)
        needed = self.needs("run", "linear_attention", "--in", self.x, "--out", self.y, **limited(1 << 30))
        self.assertGreater(needed, 2 ** 30)
        with self.x.open("wb") as file:
            file.truncate(8 << 30)  # a hole: takes no space
        self.assertGreater(self.needs("run", "gla", "--in", self.x, "--out", self.y, **limited(1 << 30)), 7 << 30)

    def test_estimates(self):
        """What check says to need is at least what it takes, and no more than twice that."""
        for line in ("gla:fwd t150000 h1 k16", "gla:bwd t60000 h1 k16", "simple_gla:fwd t200000 h1 k8 v32 bf16",
                     "kda:bwd t40000 h1 k16 bf16 rawgate beta=sigmoid l2norm state=inout",
                     "comba:bwd t40000 h2 k16 f64 rawgate",
                     "gated_delta_rule:fwd b8 t20000 h1 hv2 k8 v8 f16 strided seed=3",
                     "kda:step b1000 t1 h2 k32 v64", "kda:step b100 t8 spec=8 h2 k64 v64",
                     "linear_attention:step b1 t1 h1 k16 pool=100000",
                     "linear_attention:bwd b300 t1 h4 k64 state=inout",
                     "gla:bwd t10000 h1 k300 v1", "delta_rule:bwd t100 h1 k600", "linear_attention:bwd t4000 h1 k256"):
            need = self.needs("check", line, **limited(100 << 20))
            process = subprocess.Popen([self.program, "check", line], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0, line)
            used = usage.ru_maxrss * 1024
            self.assertTrue(0.995 * used <= need <= 2 * used,
                            f"{line}: needs {need / 2 ** 20}, took {used / 2 ** 20} MiB")


class Signals(Case):
    def start(self, *arguments, interrupt=signal.SIG_DFL):
        return subprocess.Popen([self.program, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt))

    def test_check_says_what_it_did(self):
        listing = self.folder / "problems"
        listing.write_text("gla:fwd t5 scale=1e300\n" + "gla:bwd t100\n" * 100000)
        for what in (["--random", "1000000"], ["--file", listing]):
            for number, name in ((signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")):
                report = self.folder / "report"
                process = self.start("check", "-v", *what, "--json", report)
                first = process.stdout.readline()
                process.send_signal(number)
                text = first + process.stdout.read()  # communicate() would lose what readline() took in beside its line
                self.assertEqual(process.wait(timeout=60), -number)
                process.stdout.close()
                summary = rf"(\d+) problems? checked in [\d.]+ s, (\d+) missed, then stopped by {name}"
                checked, missed = map(int, re.search(summary, text).groups())
                lines = re.findall(r"^(ok  |MISS) ", text, re.MULTILINE)
                self.assertEqual((checked, missed), (len(lines), lines.count("MISS")))
                self.assertEqual(missed, "--file" in what)
                value = json.loads(report.read_text())
                self.assertEqual((value["problems"], value["missed"], value["stopped_by"]), (checked, missed, name))
                self.assertEqual(len(value["results"]), checked)

    def test_a_second_signal_ends_it(self):
        process = self.start("check", "-v", "gla:fwd", "t5", "gla:bwd", "t100000", "h8", "k128")  # minutes
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        self.assertNotIn("checked", process.communicate(timeout=20)[0])
        self.assertEqual(process.returncode, -signal.SIGTERM)

    def test_an_ignored_signal_stays_ignored(self):
        process = self.start("check", "-v", "--random", "100", interrupt=signal.SIG_IGN)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        self.assertIn("100 problems checked", process.communicate(timeout=60)[0])
        self.assertEqual(process.returncode, 0)


if __name__ == "__main__":
    main()
