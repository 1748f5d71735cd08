//! The way from the ranks of all nodes to the rendezvous store of node 0. torch speaks plain TCP with it and believes
//! everybody, so it is on the loopback of node 0 only; other nodes have a port on theirs that leads there, over the
//! connection that the nodes have anyway.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use quinn::{Connection, RecvStream, SendStream};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Opens the port of a node other than 0.
pub(super) async fn enter(connection: Connection) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let connection = connection.clone();
            tokio::spawn(async move {
                let Ok((send, receive)) = connection.open_bi().await else { return };
                let _ = join(stream, send, receive).await;
            });
        }
    });
    Ok(port)
}

/// Connects each stream that comes from a node to the store, once that is there.
pub(super) async fn lead_on(connection: Connection, store: watch::Receiver<Option<SocketAddr>>) {
    while let Ok((send, receive)) = connection.accept_bi().await {
        let mut store = store.clone();
        tokio::spawn(async move {
            let Ok(at) = store.wait_for(Option::is_some).await.map(|at| at.expect("waited for")) else {
                return;
            };
            let Ok(stream) = TcpStream::connect(at).await else { return };
            let _ = join(stream, send, receive).await;
        });
    }
}

async fn join(stream: TcpStream, mut send: SendStream, mut receive: RecvStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut from, mut to) = stream.into_split();
    let out = async {
        tokio::io::copy(&mut from, &mut send).await?;
        send.shutdown().await
    };
    let back = async {
        tokio::io::copy(&mut receive, &mut to).await?;
        to.shutdown().await
    };
    // A failure in one direction ends both.
    tokio::try_join!(out, back).map(drop)
}
