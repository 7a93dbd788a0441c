//! Three simulated engines with their sidecars.

use std::{
    future::pending,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use berth::{
    engine::sim::{DropStream, Faults, Profile, Record, SimConfig, SimEngine, SimHandle, Times},
    harness::playground::accelerator,
    sidecar::{Sidecar, SidecarConfig, SidecarError},
    stack::fence::ABORT_AGAIN,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::Rng;

/// A token takes so long.
const STEP: Duration = Duration::from_millis(8);

/// An abort within this of a request comes too early. A life may begin and send
/// its first abort in less; the second comes later, whenever the first was sent.
/// The third one is for engines that parse even later: it is sent by a life that
/// goes on, and would be missing from one that is killed.
const LONG_PARSE: Duration = ABORT_AGAIN.saturating_sub(Duration::from_millis(15));

/// A connection of a client that is gone is held until the engine was silent
/// for so long.
const HELD: Duration = Duration::from_secs(3);

/// What sort of engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// Behind a proxy that does not pass on a close.
    proxied: bool,
    parse_delay: Duration,
}

impl Kind {
    pub(crate) const PLAIN: Self = Self {
        proxied: false,
        parse_delay: Duration::from_millis(15),
    };
    pub(crate) const PROXIED: Self = Self {
        proxied: true,
        ..Self::PLAIN
    };
    pub(crate) const SLOW_TO_PARSE: Self = Self {
        proxied: true,
        parse_delay: LONG_PARSE,
    };
}

pub(crate) struct Engines {
    all: Vec<(SimHandle, JoinHandle<Result<(), SidecarError>>)>,
    stop: CancellationToken,
}

impl Engines {
    pub(crate) async fn start(control_plane: &str, kinds: &[Kind]) -> Self {
        let stop = CancellationToken::new();
        let mut all = Vec::new();
        for (
            i,
            &Kind {
                proxied,
                parse_delay,
            },
        ) in kinds.iter().enumerate()
        {
            let engine = SimEngine::start(SimConfig {
                profile: Profile::Instant,
                step: Some(STEP),
                parse_delay,
                incremental_streaming_output: i != 1,
                stream_interval: 2,
                history: 1 << 20,
                ..SimConfig::default()
            })
            .await
            .unwrap();
            let mut config = SidecarConfig::new(control_plane, engine.url(), format!("r{i}"));
            config.accelerator = accelerator("NVIDIA H100 80GB HBM3", 81_559);
            config.timing.backoff = Duration::from_millis(20);
            config.timing.max_backoff = Duration::from_millis(100);
            config.timing.reregister_jitter = Duration::from_millis(20);
            if proxied {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                config.advertise_url = Some(format!("http://{address}"));
                tokio::spawn(proxy(listener, engine.address()));
            }
            let sidecar = Sidecar::new(config).unwrap();
            all.push((engine, tokio::spawn(sidecar.run(stop.clone()))));
        }
        Self { all, stop }
    }

    /// Some streams of one engine break off; what they carried runs on.
    pub(crate) fn misbehave(&self, rng: &mut Rng) {
        let (engine, _) = &self.all[rng.below(self.all.len() as u64) as usize];
        engine.set_faults(Faults {
            drop_stream: Some(DropStream {
                times: Times::Next(1 + rng.below(2) as u32),
                after_tokens: rng.below(8) as u32,
            }),
            ..Faults::default()
        });
    }

    pub(crate) fn behave(&self) {
        for (engine, _) in &self.all {
            engine.clear_faults();
        }
    }

    pub(crate) fn histories(&self) -> Vec<Record> {
        self.all.iter().flat_map(|(e, _)| e.history()).collect()
    }

    /// The control plane is gone: sidecars leave without a word.
    pub(crate) async fn stop(self) {
        for (_, sidecar) in &self.all {
            assert!(!sidecar.is_finished(), "a sidecar ended by itself");
        }
        self.stop.cancel();
        for (engine, sidecar) in self.all {
            sidecar.abort();
            engine.stop().await;
        }
    }
}

/// Carries bytes both ways, but not the client's close.
async fn proxy(listener: TcpListener, engine: SocketAddr) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        tokio::spawn(carry(client, engine));
    }
}

async fn carry(mut client: TcpStream, engine: SocketAddr) {
    let Ok(mut engine) = TcpStream::connect(engine).await else {
        return;
    };
    client.set_nodelay(true).unwrap();
    engine.set_nodelay(true).unwrap();
    let (mut from_client, mut to_client) = client.split();
    let (mut from_engine, mut to_engine) = engine.split();
    let gone = AtomicBool::new(false);
    let up = async {
        let _ = tokio::io::copy(&mut from_client, &mut to_engine).await;
        gone.store(true, Relaxed);
        pending::<()>().await;
    };
    let down = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match timeout(HELD, from_engine.read(&mut buffer)).await {
                Ok(Ok(n)) if n > 0 => {
                    if !gone.load(Relaxed) && to_client.write_all(&buffer[..n]).await.is_err() {
                        gone.store(true, Relaxed);
                    }
                }
                Err(_) if !gone.load(Relaxed) => {}
                Ok(_) | Err(_) => return,
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}
