//! A network between two processes that can be cut, both ways, and healed.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    sync::watch,
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// What the partition does to connections. Nobody is told of it in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// What is sent arrives when it is healed, as TCP sends it again.
    Delays,
    /// What is sent is lost, and connections that were open then never carry
    /// anything again, as where something on the way has forgotten them.
    Swallows,
}

/// The network; everything on it ends when it is dropped.
pub(crate) struct Proxy {
    pub(crate) url: String,
    cut: watch::Sender<Option<Manner>>,
    _stop: DropGuard,
}

impl Proxy {
    /// To `http://host:port`.
    pub(crate) async fn start(to: &str) -> Self {
        let to = to.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (cut, is_cut) = watch::channel(None);
        let stop = CancellationToken::new();
        let ended = stop.clone();
        tokio::spawn(ended.clone().run_until_cancelled_owned(async move {
            while let Ok((from, _)) = listener.accept().await {
                let connection = carry(from, to.clone(), is_cut.clone());
                tokio::spawn(ended.clone().run_until_cancelled_owned(connection));
            }
        }));
        Self {
            url,
            cut,
            _stop: stop.drop_guard(),
        }
    }

    pub(crate) fn cut(&self, manner: Manner) {
        self.cut.send_replace(Some(manner));
    }

    pub(crate) fn heal(&self) {
        self.cut.send_replace(None);
    }
}

async fn carry(from: TcpStream, to: String, mut cut: watch::Receiver<Option<Manner>>) {
    if pass(&mut cut).await.is_err() {
        // Kept open, so that the other side hears nothing.
        return swallow(from).await;
    }
    let Ok(to) = TcpStream::connect(to).await else {
        return;
    };
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
    tokio::join!(
        one_way(from_read, to_write, cut.clone()),
        one_way(to_read, from_write, cut)
    );
}

/// Returns when there is a way; an error where there will be none for this
/// connection.
async fn pass(cut: &mut watch::Receiver<Option<Manner>>) -> Result<(), ()> {
    let now = cut.wait_for(|cut| *cut != Some(Manner::Delays)).await;
    match now.map(|cut| *cut) {
        Ok(None) => Ok(()),
        Ok(Some(_)) | Err(_) => Err(()),
    }
}

async fn one_way(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut cut: watch::Receiver<Option<Manner>>,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = tokio::select! {
            biased;
            _ = cut.wait_for(|cut| *cut == Some(Manner::Swallows)) => break,
            read = from.read(&mut buffer) => read,
        };
        let ended = !matches!(read, Ok(1..));
        if pass(&mut cut).await.is_err() {
            break;
        }
        let length = read.unwrap_or(0);
        if ended || to.write_all(&buffer[..length]).await.is_err() {
            let _ = to.shutdown().await;
            return;
        }
    }
    // Forgotten: nothing comes out of it any more, not even its end.
    swallow(from).await;
    std::future::pending::<()>().await;
    drop(to);
}

async fn swallow(mut from: impl tokio::io::AsyncRead + Unpin) {
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    std::future::pending::<()>().await;
    drop(from);
}
