//! The control plane: the real binary, a process of its own.

use std::{
    fs::{File, OpenOptions},
    net::TcpListener,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use berth::failpoint::{self, Point};
use tokio::{
    net::TcpStream,
    process::{Child, Command},
    time::{Instant, sleep},
};

use crate::Rng;

/// Longer than any start on a crowded machine.
const START: Duration = Duration::from_secs(60);

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

pub(crate) struct Plane {
    dir: PathBuf,
    port: u16,
    child: Option<Child>,
}

impl Plane {
    pub(crate) fn new(dir: &Path, rng: &mut Rng) -> Self {
        // Below the range that the system takes the ports of outgoing
        // connections from: while the control plane is down, nobody may get
        // its port by chance, nor a client connect to itself.
        let port = (0..1000)
            .map(|_| 12_000 + rng.below(20_000) as u16)
            .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
            .unwrap();
        Self {
            dir: dir.to_owned(),
            port,
            child: None,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// A new life, to end at this passage of this point.
    pub(crate) fn start(&mut self, end: Option<(Point, u64)>) {
        assert!(self.child.is_none());
        let log: File = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(self.log())
            .unwrap();
        let built = env!("CARGO_BIN_EXE_berth");
        let binary = std::env::var("BERTH_CRASH_BINARY").unwrap_or_else(|_| built.to_owned());
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
            command.env_remove(name);
        }
        if let Some((point, passages)) = end {
            command.env(failpoint::VARIABLE, format!("{}:{passages}", point.name()));
        }
        command
            .arg("serve")
            .args(["--listen", &format!("127.0.0.1:{}", self.port)])
            .args(["--admin-listen", "127.0.0.1:0"])
            .arg("--data-dir")
            .arg(self.dir.join("store"))
            // With a second and a half until a silent replica is dead: on a
            // crowded machine a beat may be late, and none is to be lost.
            .args(["--heartbeat-interval", "250ms"])
            .args(["--grace", "1s"])
            .args(["--free-space-floor", "1048576"])
            .args(["--log", "info"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        self.child = Some(command.spawn().unwrap());
    }

    /// Waits until it listens, or has died before that; how long it took.
    pub(crate) async fn listens(&mut self) -> Duration {
        let begun = Instant::now();
        while self.child.as_mut().unwrap().try_wait().unwrap().is_none()
            && TcpStream::connect(("127.0.0.1", self.port)).await.is_err()
        {
            assert!(begun.elapsed() < START, "no start: {}", self.said());
            sleep(Duration::from_millis(5)).await;
        }
        begun.elapsed()
    }

    /// Waits for its end; false when it lives on. An end that is not by the
    /// failpoint is a fault.
    pub(crate) async fn dies_within(&mut self, time: Duration) -> bool {
        let child = self.child.as_mut().unwrap();
        match tokio::time::timeout(time, child.wait()).await {
            Ok(status) => {
                self.child = None;
                let status = status.unwrap();
                assert_eq!(status.signal(), Some(SIGABRT), "{status}: {}", self.said());
                self.look_at_log();
                true
            }
            Err(_) => false,
        }
    }

    pub(crate) async fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.start_kill().unwrap();
        let status = child.wait().await.unwrap();
        assert!(
            matches!(status.signal(), Some(SIGKILL | SIGABRT)),
            "{status}: {}",
            self.said()
        );
        self.look_at_log();
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    fn look_at_log(&self) {
        let said = self.said();
        assert!(!said.contains("panicked"), "{said}");
        assert!(!said.contains("ERROR"), "{said}");
    }
}
