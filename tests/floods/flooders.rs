//! Those who flood: bytes written by hand from one niced thread, so that what good
//! traffic loses is lost at the server.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::wire;

const SAMPLE: &str = "/berth.v1.SamplingService/Sample";
/// Who is sent away comes again after so long.
const AGAIN: Duration = Duration::from_secs(1);
/// Connections that send as fast as they are let.
const FAST: u64 = 4;
/// Frames go in batches, so often.
const BATCHES: u64 = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flood {
    /// Half of them say nothing, half of them say hello.
    Idle,
    /// Half of them on the way to a request, half of them in its body.
    ByteASecond,
    /// A call and its reset, again and again.
    Resets,
    Pings,
}

impl Flood {
    pub const ALL: [Self; 4] = [Self::Idle, Self::ByteASecond, Self::Resets, Self::Pings];

    /// All are, where none is named.
    pub fn is_wanted(self) -> bool {
        let name = format!("{self:?}").to_lowercase();
        let named = std::env::var("BERTH_FLOODS").ok();
        named.is_none_or(|named| named.split(',').any(|wanted| wanted == name))
    }

    /// Of the long form.
    fn connections(self) -> u64 {
        match self {
            Self::Idle => 5000,
            Self::ByteASecond => 500,
            Self::Resets | Self::Pings => FAST,
        }
    }

    /// Frames a second that all connections offer together.
    fn rate(self) -> u64 {
        let rate = std::env::var("BERTH_FLOOD_RATE").ok();
        let rate = rate.map(|text| text.parse().unwrap());
        match self {
            Self::Idle => 0,
            Self::ByteASecond => self.connections(),
            Self::Resets => rate.unwrap_or(5_000),
            Self::Pings => rate.unwrap_or(20_000),
        }
    }
}

pub struct Flooder {
    stop: CancellationToken,
    thread: JoinHandle<()>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    connected: AtomicU64,
    sent: AtomicU64,
}

impl Flooder {
    pub fn start(flood: Flood, to: SocketAddr, is_long: bool) -> Self {
        let stop = CancellationToken::new();
        let counts = Arc::new(Counts::default());
        let connections = match flood {
            Flood::Idle | Flood::ByteASecond if !is_long => flood.connections() / 10,
            _ => flood.connections(),
        };
        let thread = std::thread::spawn({
            let (stop, counts) = (stop.clone(), Arc::clone(&counts));
            move || {
                // Of this thread alone, on Linux.
                let _ = rustix::process::nice(10);
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    for n in 0..connections {
                        let counts = Arc::clone(&counts);
                        tokio::spawn(again(flood, n, to, counts));
                        // A thousand a second.
                        if n % 10 == 9 {
                            sleep(Duration::from_millis(10)).await;
                        }
                    }
                    stop.cancelled().await;
                });
            }
        });
        Self {
            stop,
            thread,
            counts,
        }
    }

    /// Closes its connections; what it did.
    pub fn stop(self) -> String {
        self.stop.cancel();
        self.thread.join().unwrap();
        let connected = self.counts.connected.load(Ordering::Relaxed);
        let sent = self.counts.sent.load(Ordering::Relaxed);
        format!("{connected} connections, {sent} frames or bytes")
    }
}

async fn again(flood: Flood, n: u64, to: SocketAddr, counts: Arc<Counts>) {
    loop {
        // Several addresses: no limit of one of them helps.
        let from = [127, 0, 0, 2 + (n % 8) as u8];
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        if let Ok(stream) = socket.connect(to).await {
            counts.connected.fetch_add(1, Ordering::Relaxed);
            let _ = once(flood, n, stream, &counts).await;
        }
        sleep(AGAIN).await;
    }
}

/// Until the server ends it.
async fn once(flood: Flood, n: u64, stream: TcpStream, counts: &Counts) -> std::io::Result<()> {
    let _ = stream.set_nodelay(true);
    let (mut read, mut write) = stream.into_split();
    // What comes is thrown away.
    let reading = async {
        let mut bytes = vec![0; 4096];
        while read.read(&mut bytes).await? > 0 {}
        Ok(())
    };
    let sent = |n: u64| counts.sent.fetch_add(n, Ordering::Relaxed);
    let writing = async {
        let hello = wire::hello();
        match flood {
            Flood::Idle => {
                if n % 2 == 1 {
                    write.write_all(&hello).await?;
                }
                std::future::pending().await
            }
            Flood::ByteASecond => {
                let way = [&hello[..], &wire::call(1, SAMPLE)].concat();
                let mut slow = interval(Duration::from_secs(1));
                if n % 2 == 1 {
                    write.write_all(&way).await?;
                    let message = [0, 0, 0, 100, 0];
                    write
                        .write_all(&wire::frame(wire::DATA, 0, 1, &message))
                        .await?;
                    loop {
                        slow.tick().await;
                        write
                            .write_all(&wire::frame(wire::DATA, 0, 1, &[1]))
                            .await?;
                        sent(1);
                    }
                }
                // Half of these begin within the preface, half within the headers.
                let begun = if n.is_multiple_of(4) { 0 } else { hello.len() };
                write.write_all(&way[..begun]).await?;
                for byte in &way[begun..] {
                    slow.tick().await;
                    write.write_all(&[*byte]).await?;
                    sent(1);
                }
                std::future::pending().await
            }
            Flood::Resets | Flood::Pings => {
                write.write_all(&hello).await?;
                let each = (flood.rate() / FAST / BATCHES).max(1);
                let mut batches = interval(Duration::from_secs(1) / BATCHES as u32);
                let pings = wire::ping().repeat(each as usize);
                let mut stream = 1;
                loop {
                    batches.tick().await;
                    if flood == Flood::Pings {
                        write.write_all(&pings).await?;
                    } else {
                        let mut bytes = Vec::new();
                        for _ in 0..each {
                            bytes.extend(wire::call(stream, SAMPLE));
                            bytes.extend(wire::reset(stream));
                            stream += 2;
                        }
                        write.write_all(&bytes).await?;
                    }
                    sent(each);
                }
            }
        }
    };
    tokio::select! {
        ended = reading => ended,
        ended = writing => ended,
    }
}
