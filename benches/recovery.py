#!/usr/bin/env python3
"""What a change of the world costs on one machine, or on hosts that are network namespaces of it.

`kill`: from SIGKILL of one of three ranks to the end of the first step of the new world. `resize`: from the end of the last
step of two ranks to the begin of the first one of three, in which nothing is trained.

Evenkeel and torchrun's elastic agent side by side: an 8.43 M parameter Llama (8 layers, width 256,
8 heads, ff 688, vocabulary 4096), a global batch of 12 sequences of 64 tokens, three ranks of which
one is killed. Prints one JSON line a trial.

    cargo build --release
    python3 benches/recovery.py --trials 5
    python3 benches/recovery.py --trials 5 --change resize --against ANOTHER/evenkeel   # in turns, with the ratio
    sudo python3 benches/recovery.py --trials 5 --hosts --change resize            # three hosts by SSH
    python3 benches/recovery.py --trials 3 --peer          # the same with torchrun (needs torch)
"""
import argparse, json, os, pathlib, re, shutil, signal, socket, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("--trials", type=int, default=5)
p.add_argument("--binary", default=str(here.parent / "target/release/evenkeel"))
p.add_argument("--change", choices=["kill", "resize"], default="kill")
p.add_argument("--against", help="another build of the program, measured in turns with this one")
p.add_argument("--hosts", action="store_true",
               help="one rank on each of three hosts by SSH; the host of a killed rank stays, so a new process takes its place")
p.add_argument("--peer", action="store_true", help="measure torchrun instead")
p.add_argument("--python", default=sys.executable, help="the Python that has torch")
a = p.parse_args()

RECIPE = (here / "recovery.json").read_text()


def until(condition, seconds=180):
    end = time.time() + seconds
    while time.time() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise SystemExit("waited in vain")


def steps(path):
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("kind") == "step":
            found.append(record)
    return found


def ranks_of(pattern):
    output = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    return [int(pid) for pid in output.split()]


class Hosts:
    """Three hosts with OpenSSH's server, each a network namespace, and one beside them for the launcher."""

    def __init__(self):
        self.name = f"ekb{os.getpid()}"
        self.place = pathlib.Path(tempfile.mkdtemp())
        place = self.place
        self.sh(f"""mkdir -p /run/sshd {place}/bin
            ssh-keygen -q -t ed25519 -N '' -f {place}/host
            ssh-keygen -q -t ed25519 -N '' -f {place}/user
            cp {place}/user.pub {place}/authorized
            {{ printf '10.9.0.* '; cat {place}/host.pub; }} >{place}/known
            ip netns add {self.name}; ip -n {self.name} link set lo up
            ip -n {self.name} link add lab0 type bridge; ip -n {self.name} link set lab0 up
            ip -n {self.name} addr add 10.9.0.254/24 dev lab0""")
        (place / "ssh.conf").write_text(f"IdentityFile {place}/user\nUserKnownHostsFile {place}/known\nUser root\n")
        (place / "sshd.conf").write_text(
            f"HostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nPidFile none\nStrictModes no\n"
            f"PermitRootLogin yes\nMaxStartups 100\nSetEnv XDG_CACHE_HOME={place}/cache\n")
        (place / "bin/ssh").write_text(f"#!/bin/sh\nexec /usr/bin/ssh -F {place}/ssh.conf \"$@\"\n")
        (place / "bin/ssh").chmod(0o755)
        for host in (1, 2, 3):
            of_host = f"{self.name}h{host}"
            self.sh(f"""ip netns add {of_host}; ip -n {of_host} link set lo up
                ip link add name v{host} netns {self.name} type veth peer name eth0 netns {of_host}
                ip -n {self.name} link set dev v{host} master lab0 up
                ip -n {of_host} addr add 10.9.0.{host}/24 dev eth0; ip -n {of_host} link set eth0 up
                ip netns exec {of_host} /usr/sbin/sshd -f {place}/sshd.conf""")

    @staticmethod
    def sh(script):
        subprocess.run(["sh", "-ec", script], check=True)

    def launch(self, words):
        path = f"{self.place}/bin:{os.environ['PATH']}"
        words = ["ip", "netns", "exec", self.name, *words, "--on", "ssh:10.9.0.1,10.9.0.2,10.9.0.3"]
        return subprocess.Popen(words, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    def end(self):
        for name in [f"{self.name}h{host}" for host in (1, 2, 3)] + [self.name]:
            self.sh(f"ip netns pids {name} | xargs -r kill -9; ip netns delete {name}")
        shutil.rmtree(self.place, ignore_errors=True)


def here_only(words):
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def evenkeel(binary=a.binary):
    directory = pathlib.Path(tempfile.mkdtemp())
    recipe, run = directory / "recipe.yaml", directory / "run"
    recipe.write_text(RECIPE)
    procs = "3" if a.change == "kill" else "2"
    launch = hosts.launch if hosts else here_only
    launcher = launch([binary, "launch", str(recipe), "--procs", procs, "--out", str(run)])
    try:
        until(lambda: len(steps(run / "gen-1/metrics.jsonl")) >= 10)
        killed = time.time()
        if a.change == "kill":
            os.kill(max(ranks_of(f"rank --run {run} ")), signal.SIGKILL)
        else:
            subprocess.run([binary, "resize", str(run), "3"], check=True, stdout=subprocess.DEVNULL)
        first = until(lambda: steps(run / "gen-2/metrics.jsonl"))[0]
        before = steps(run / "gen-1/metrics.jsonl")[-1]
        if a.change == "kill":
            seconds = first["time"] - killed
        else:
            seconds = first["time"] - first["seconds"] - before["time"]
        record = json.loads((run / "gen-2/record.json").read_text())
        pinned = (record.get("carried") or record["start"] or {}).get("samples", 0)
        return dict(who=binary, seconds=round(seconds, 3), world=first["world"],
                    batch=[before["batch"], first["batch"]],
                    steps_lost=max(0, (before["samples"] - pinned) // 12))
    finally:
        launcher.kill()
        launcher.wait()
        until(lambda: not ranks_of(f"rank --run {run} "))
        shutil.rmtree(directory, ignore_errors=True)


def torchrun():
    directory = pathlib.Path(tempfile.mkdtemp())
    log = directory / "steps.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # See goodput.py.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(
        [a.python, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc_per_node=1", "--max_restarts=3",
         "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=recovery", "--local_addr=127.0.0.1",
         "--rdzv_conf=join_timeout=30,last_call_timeout=1,timeout=30,keep_alive_interval=1,keep_alive_max_attempt=2",
         str(here / "recovery_peer.py"), str(log)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    # The first agent holds the rendezvous, and lives: without it nobody would come back at all.
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    others = [subprocess.Popen(launcher.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
              for _ in range(2)]
    agents = [launcher, *others]

    def logged():
        try:
            return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        except FileNotFoundError:
            return []

    try:
        until(lambda: [r for r in logged() if r["step"] >= 10])
        # A node that is gone: its agent and its rank.
        victim = agents.pop()
        children = ranks_of_parent(victim.pid)
        killed = time.time()
        victim.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        before = logged()[-1]
        first = until(lambda: [r for r in logged() if r["world"] == 2])[0]
        return dict(who="torchrun", seconds=round(first["time"] - killed, 3), world=first["world"],
                    batch=[before["batch"], first["batch"]], steps_lost=before["step"] - first["step"] + 1)
    finally:
        for agent in agents:
            for child in ranks_of_parent(agent.pid):
                try:
                    os.kill(child, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            agent.kill()
            agent.wait()
        shutil.rmtree(directory, ignore_errors=True)


def ranks_of_parent(pid):
    output = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in output.split()]


def median(results):
    print(json.dumps(dict(who=results[0]["who"], median=statistics.median(r["seconds"] for r in results),
                          worst=max(r["seconds"] for r in results))))


results, others = [], []
hosts = Hosts() if a.hosts else None
try:
    for _ in range(a.trials):
        results.append(torchrun() if a.peer else evenkeel())
        print(json.dumps(results[-1]), flush=True)
        if a.against:
            others.append(evenkeel(a.against))
            print(json.dumps(others[-1]), flush=True)
finally:
    if hosts:
        hosts.end()
median(results)
if others:
    median(others)
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(results, others)]
    print(json.dumps(dict(ratios=[round(ratio, 3) for ratio in ratios], median=round(statistics.median(ratios), 3))))
