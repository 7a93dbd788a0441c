//! `berth serve` as a process whose addresses are known.

use std::{
    net::SocketAddr,
    process::{Command, Stdio},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::process::Process;

pub struct Served {
    pub process: Process,
    pub grpc: SocketAddr,
    pub admin: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Served {
    /// Runs `command` with the arguments of `berth serve` and these options.
    pub async fn start(mut command: Command, options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let variables = std::env::vars().filter(|(name, _)| name.starts_with("BERTH_"));
        for (name, _) in variables {
            command.env_remove(name);
        }
        let child = command
            .arg("serve")
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(["--log-format", "json", "--data-dir"])
            .arg(dir.path().join("store"))
            .args(options)
            .stderr(Stdio::from(std::fs::File::create(&log).unwrap()))
            .spawn()
            .unwrap();
        let process = Process(child);
        let begun = Instant::now();
        loop {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it never listened"
            );
            let text = std::fs::read_to_string(&log).unwrap();
            let listening = text
                .lines()
                .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
                .find(|entry| entry["grpc"].is_string());
            if let Some(entry) = listening {
                let address = |port: &str| entry[port].as_str().unwrap().parse().unwrap();
                return Self {
                    process,
                    grpc: address("grpc"),
                    admin: address("admin"),
                    _dir: dir,
                };
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}
