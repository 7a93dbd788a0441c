//! The machine's GPUs, as `nvidia-smi` tells them. Names are kept as printed
//! and never matched; a machine without the program has none.

use std::{process::Stdio, time::Duration};

use tokio::{io::AsyncReadExt, process::Command};

use crate::engine::facts::Devices;

/// Longest time that the program may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Bytes of its output at most.
const MAX_OUTPUT: u64 = 64 * 1024;

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// E.g. `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Of the device.
    pub memory_bytes: u64,
    /// E.g. `GPU-8f1c...`.
    pub uuid: String,
}

/// All GPUs that can be seen, in order of their index. Empty when there is no
/// driver, or it does not answer in time.
pub async fn gpus() -> Vec<Gpu> {
    match tokio::time::timeout(LIMIT, ask()).await {
        Ok(Ok(output)) => parse(&output),
        Ok(Err(error)) => {
            tracing::debug!(%error, "nvidia-smi cannot be run");
            Vec::new()
        }
        Err(_) => {
            tracing::warn!("nvidia-smi does not answer");
            Vec::new()
        }
    }
}

async fn ask() -> std::io::Result<String> {
    let mut child = Command::new("nvidia-smi")
        .args([
            "--query-gpu=name,memory.total,uuid",
            "--format=csv,noheader,nounits",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_OUTPUT).read_to_string(&mut output).await?;
    }
    if child.wait().await?.success() {
        Ok(output)
    } else {
        Err(std::io::Error::other("it failed"))
    }
}

/// Lines of `name, MiB, uuid`. A line that is none is left out.
fn parse(output: &str) -> Vec<Gpu> {
    output
        .lines()
        .filter_map(|line| {
            let mut fields = line.rsplitn(3, ',').map(str::trim);
            let uuid = fields.next()?;
            // Unified memory is printed as [N/A].
            let mebibytes: u64 = fields.next()?.parse().unwrap_or(0);
            let name = fields.next()?;
            (!name.is_empty() && uuid.starts_with("GPU-")).then(|| Gpu {
                name: name.to_owned(),
                memory_bytes: mebibytes.saturating_mul(1024 * 1024),
                uuid: uuid.to_owned(),
            })
        })
        .collect()
}

/// The devices of one rank; empty where this machine does not have them all.
pub fn of_rank(gpus: &[Gpu], devices: Devices, rank: u32) -> Vec<String> {
    let first = if devices.shared {
        0
    } else {
        u64::from(rank) * u64::from(devices.per_rank)
    };
    (first..first + u64::from(devices.per_rank))
        .map(|n| {
            let index = u64::from(devices.base) + n * u64::from(devices.step);
            usize::try_from(index)
                .ok()
                .and_then(|index| gpus.get(index))
        })
        .map(|gpu| gpu.map(|gpu| gpu.uuid.clone()))
        .collect::<Option<_>>()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "NVIDIA H100 80GB HBM3, 81559, GPU-1\nNVIDIA H200, 143771, GPU-2\n";

    #[test]
    fn names_are_kept_as_printed() {
        let gpus = parse(TWO);
        assert_eq!(gpus[0].name, "NVIDIA H100 80GB HBM3");
        assert_eq!(gpus[0].memory_bytes, 81_559 * 1024 * 1024);
        assert_eq!(gpus[1].uuid, "GPU-2");
    }

    #[test]
    fn nonsense_is_no_gpu() {
        assert_eq!(parse("NVIDIA GB10, [N/A], GPU-3")[0].memory_bytes, 0);
        for none in ["", "No devices were found", "a,b", ",,", "x, 1, 2"] {
            assert!(parse(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn ranks_have_their_devices_in_both_layouts() {
        let gpus: Vec<Gpu> = (0..8)
            .map(|n| Gpu {
                name: "x".into(),
                memory_bytes: 1,
                uuid: format!("GPU-{n}"),
            })
            .collect();
        let plain = Devices {
            per_rank: 2,
            base: 0,
            step: 1,
            shared: false,
        };
        assert_eq!(of_rank(&gpus, plain, 1), ["GPU-2", "GPU-3"]);
        let shared = Devices {
            per_rank: 4,
            base: 4,
            step: 1,
            shared: true,
        };
        assert_eq!(
            of_rank(&gpus, shared, 3),
            ["GPU-4", "GPU-5", "GPU-6", "GPU-7"]
        );
        // A rank on another machine.
        assert!(of_rank(&gpus, plain, 4).is_empty());
    }
}
