"""Another user of the machine tries to reach torch's agents in the moment in which they begin to listen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.network import require_namespaces

pytestmark = pytest.mark.netns

ATTACKER = Path(__file__).parent / "race.py"
# Only a few ports are left, in a network of its own. The victim starts and stops agents.
VICTIM = """
import os, sys, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
from ringmaster_dist.transport import agent, loopback
role, number, user, hold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "hold"
if user:
    os.setgid(user)
    os.setuid(user)
if not hold:
    def refused():
        raise OSError("not here")
    loopback._hold_listen = refused
for index in range(number):
    if role == "server":
        agent.start_server_agent(4, 60.0, insecure=not hold).socket.close()
    else:
        agent.start_worker_agent(f"worker-{index}", "127.0.0.1:1", 60.0, insecure=not hold)
    time.sleep(0.005)  # torch's shutdown may hang in the first moment of an agent
    agent.stop_agent()
print("done")
"""
NETWORK = 'ip link set lo up && echo 50000 50031 > /proc/sys/net/ipv4/ip_local_port_range && exec "$@"'


def answers(folder, role, number, *, hold, user=0):
    """How many of the agents that were started have answered the attacker."""
    script = folder / "both.sh"
    script.write_text('"$1" "$2" "$3" & attacker=$!; shift 3; sleep 1; "$@"; code=$?; kill $attacker; exit $code')
    victim = [sys.executable, "-c", VICTIM, role, str(number), str(user), "hold" if hold else "open"]
    command = ["unshare", "--net", "sh", "-c", NETWORK, "sh", "sh", str(script), sys.executable, str(ATTACKER)]
    wins = folder / f"wins-{role}-{hold}-{user}"
    done = subprocess.run([*command, str(wins), *victim], capture_output=True, text=True, timeout=300)
    assert "ready" in done.stdout, done.stderr
    assert "done" in done.stdout, done.stderr
    return len(wins.read_text().splitlines())


@pytest.mark.parametrize("role", ["server", "worker"])
def test_nobody_reaches_an_agent_when_it_begins_to_listen(role, tmp_path):
    require_namespaces()
    assert answers(tmp_path, role, 200, hold=False) > 0, "this attacker finds no agent that is open for a moment"
    assert answers(tmp_path, role, 1000, hold=True) == 0


def test_an_ordinary_user_can_close_its_agents_too(tmp_path):
    require_namespaces()
    assert answers(tmp_path, "server", 100, hold=True, user=65534) == 0


def test_where_the_kernel_cannot_hold_back_nothing_is_served():
    """Seccomp is refused, as in a container with another profile. One line says what to allow."""
    refused = VICTIM.replace("if not hold:", "if True:")
    done = subprocess.run([sys.executable, "-c", refused, "server", "1", "0", "hold"], capture_output=True, text=True)
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()
    assert "allow the system calls prctl and seccomp" in line
    assert "server.insecure=true" in line
