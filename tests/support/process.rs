//! The binary as processes of its own.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

/// Without our own variables: they would change what is tested.
pub fn berth() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
        command.env_remove(name);
    }
    command
}

/// Whether it succeeds, and all that it says.
pub fn check(command: &mut Command) -> (bool, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = [stdout, stderr].concat();
    (status.success(), String::from_utf8(text).unwrap())
}

/// A running `berth serve`.
pub struct Serve {
    process: Process,
    pub url: String,
    pub dir: tempfile::TempDir,
}

impl Serve {
    pub fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (process, url) = Self::spawn(dir.path(), "127.0.0.1:0", options);
        Self { process, url, dir }
    }

    /// Again, on the same store and the same port, after it has ended.
    pub fn restart(&mut self, options: &[&str]) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        let (process, url) = Self::spawn(self.dir.path(), &listen, options);
        assert_eq!(url, self.url);
        self.process = process;
    }

    fn spawn(dir: &std::path::Path, listen: &str, options: &[&str]) -> (Process, String) {
        let mut child = berth()
            .args(["serve", "--listen", listen])
            .args(["--admin-listen", "127.0.0.1:0"])
            .args(["--log-format", "json", "--data-dir"])
            .arg(dir.join("store"))
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The log says where it listens.
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let url = loop {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
            let entry: serde_json::Value = serde_json::from_str(&line).unwrap();
            if let Some(grpc) = entry["grpc"].as_str() {
                break format!("http://{grpc}");
            }
        };
        // Read on, so that it never blocks on a full pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        (Process(child), url)
    }

    pub fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    pub async fn ended(&mut self) -> ExitStatus {
        self.process.ended().await
    }

    pub fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().unwrap().is_some()
    }
}

/// A child; killed when it is dropped.
pub struct Process(pub Child);

impl Process {
    pub fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(
            Command::new("kill")
                .args([name, &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    pub async fn ended(&mut self) -> ExitStatus {
        for _ in 0..3000 {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("it does not end");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
